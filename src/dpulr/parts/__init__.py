"""What a `PrivacyEngine` is made of. The step itself is in engine.py."""
