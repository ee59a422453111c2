"""What the library costs, as ratios measured side by side in one run."""
