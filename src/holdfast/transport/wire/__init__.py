"""PURE. The wire protocol between peers: messages as bytes, signatures, admission."""
