"""A worker whose device is a clock: the whole protocol, and the time that a step would take, without tensors."""
