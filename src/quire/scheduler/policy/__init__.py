"""The order in which new requests are served."""
