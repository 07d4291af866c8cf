"""KV caches: the formats of quantized ones (`formats`), and attention to prefixes that sequences share (`cascade`)."""
