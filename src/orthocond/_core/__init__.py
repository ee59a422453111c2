"""What the packages share and users never import: registries, precision, weight layouts, compile guards."""
