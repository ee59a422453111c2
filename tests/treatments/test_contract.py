"""The contract, for every registered part and every pair."""

import pytest

from contract import CONTRACTS, compiles, specifications


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)
@pytest.mark.parametrize("spec", specifications())
def test_contract(spec, contract):
    contract(spec)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch.compile's own
@pytest.mark.parametrize("spec", specifications())
def test_compiled(spec):
    compiles(spec)
