"""The KV-cache manager: block tables, reference counts, block hashes and credits of every worker group's pool."""
