"""KV caches: the formats of quantized ones (`formats`), and attention to a prefix that sequences share (`cascade`), or to
a sliding window and the first tokens (`anchored`). `volta_fa` exports their public functions."""
