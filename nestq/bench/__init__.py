"""``nestq bench``: the speed of decoding, end to end."""
