"""Callbacks for training frameworks: one module for each, which imports its framework.

`orthocond.integrations.lightning` is for Lightning's ``Trainer``, `orthocond.integrations.transformers` for that of
Hugging Face. Each has a ``TreatmentCallback`` and a ``ConditionCallback``.
"""
