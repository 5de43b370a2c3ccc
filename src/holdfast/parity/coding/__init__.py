"""PURE. Erasure codes and the libraries that compute them."""
