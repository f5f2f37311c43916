"""Every lie of a remote about everything that it can lie about: actions, signatures, manifests and pieces.

What no lie may do: change a byte of what is built, fail the build, hold it beyond the timeout, fill the memory, ask a host that
nobody named, or tell more than one message.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..store.remote.liar import KINDS
from ..store.remote.lies import TIMEOUT, deceived, lying, require_harmless

pytest.importorskip("aiohttp", reason="pip install -e '.[test]'")
pytest.importorskip("model_signing", reason="pip install -e '.[test]'")

from sdflow.store.signing import Signer, make_key

CASES = [
    (kind, of) for kind in KINDS if kind != "endless_pages" for of in ("actions", "objects", "pieces", "signatures")
]


def test_no_lie_about_anything_harms_a_build(tmp_path: Path) -> None:
    tmp_path.joinpath("lies").mkdir()
    key = make_key(tmp_path / "key.pem")
    with lying(tmp_path / "lies", Signer(tmp_path / "key.pem")) as lies:
        found = deceived(lies, tmp_path / "deceived", CASES, trust=[key])
        for (kind, of), each in zip(CASES, found, strict=True):
            require_harmless(kind, of, each)
        assert lies.elsewhere == [], "a host that nobody named was asked"
        honest = min(each["seconds"] for each in found)
        assert max(each["seconds"] for each in found) < honest + 10 * TIMEOUT
    print(f"{len(KINDS) - 1} kinds of lies, {len(CASES)} cases")
