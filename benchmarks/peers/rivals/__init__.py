"""One file a rival, each with the interface that `contract.py` declares."""
