"""Offline training: SFT, DPO and reward models, one optimizer step for each batch."""
