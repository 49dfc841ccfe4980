"""odb-ref: online dynamic batching you can check. `odb_ref.core` is the protocol, `odb_ref.torch` the DataLoader."""
