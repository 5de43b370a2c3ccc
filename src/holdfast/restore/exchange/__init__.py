"""Exchanges blocks between ranks that want the same ones. No torch."""
