"""What the four services share: message values, codecs, links, errors, configuration, logs, metrics."""
