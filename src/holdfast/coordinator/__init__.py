"""PURE. Decides who may write which slot, and what becomes durable: events in, actions out."""
