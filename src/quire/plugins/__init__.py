"""Stores and transfers of KV blocks that need a package of their own. Entry points name them."""
