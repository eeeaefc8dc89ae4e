"""Withdrawal-aware fine-tuning: a checkpoint whose image tokens may leave earlier, at equal answers."""
