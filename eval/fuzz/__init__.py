"""Random calls compared with the contract."""
