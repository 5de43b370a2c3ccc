"""PURE. Plans parity: host groups, placement, protection state, memory and survival."""
