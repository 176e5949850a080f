"""``nestq compare`` and ``nestq ablate``: many ways to draft, one model, one engine."""
