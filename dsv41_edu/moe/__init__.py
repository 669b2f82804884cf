"""Mixture of experts: gate, experts, balance, placement, statistics."""
