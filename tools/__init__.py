"""Training and export: needs the extra `edgeyolo[tools]` (torch, and Ultralytics, which is AGPL-3.0)."""
