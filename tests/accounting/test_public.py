"""What `dpulr.accounting` shows, and what it loads."""

import os
import subprocess
import sys

import pytest

from dpulr import accounting as acc


def test_the_public_names():
    for name in acc.__all__:
        assert getattr(acc, name) is not None
    assert {"gaussian_epsilon", "calibrate", "register_release", "PaperRelease", "Ledger"} <= set(acc.__all__) == set(dir(acc))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = acc.nothing


def test_no_torch_and_a_quick_start():
    """In a fresh interpreter: every module of the package, and a price, without torch."""
    code = (
        "import sys, pkgutil, importlib, dpulr.accounting as a\n"
        "from dpulr.accounting import events\n"
        "events.to_dict(events.GaussianRelease(2.0))\n"
        "assert 'scipy' not in sys.modules and 'numpy' not in sys.modules\n"
        "for m in pkgutil.iter_modules(a.__path__): importlib.import_module(a.__name__ + '.' + m.name)\n"
        "a.gaussian_epsilon(noise_multiplier=2.0, sample_rate=0.01, steps=10, delta=1e-5)\n"
        "for name in a.__all__: getattr(a, name)\n"
        "assert callable(a.calibrate)\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DPULR_CACHE": "off"})
