"""Everything on the Python side that depends on torch's version or on its private names.

Works with every release in `eagercache.base.torch_versions`. What differs between them is told by
what is there, not by the number. The functions import Inductor when called, never before.
"""
