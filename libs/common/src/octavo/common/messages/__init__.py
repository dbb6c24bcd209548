"""What the services say to each other, as plain values.

One module per hop. A sans-I/O core takes and returns these; `octavo.common.codecs` turns them into
the protobuf messages of `proto/octavo/v1` and back, and the local transport hands them over as they are.
"""
