"""A remote cache that machines share: any URL that fsspec reads, a folder, or a zip file.

PREFIX/sdflow-v1/pieces/ab/<sha256>           a part of a file, named by its content
                 objects/ab/<tree digest>     manifest: the files, and the pieces of each
                 actions/ab/<action digest>   the commit point: the action produced the object
                 signatures/ab/<sha256>.sig   OpenSSF Model Signing signature of the action file with this digest
                 verified/ab/<tree digest>…   claims of verification, with package versions
                 structures.json              index written by `sdflow cache export`

Pieces are uploaded first, then the manifest, the action last, so visible entries are complete. Downloads are checked by
digest. A slow, missing, wrong or hostile remote therefore costs time at most.
"""

from sdflow.store.remote.remote import Remote
from sdflow.store.remote.spec import RemoteSpec, remote_from_environment
from sdflow.store.remote.trust import Claim

__all__ = ["Claim", "Remote", "RemoteSpec", "remote_from_environment"]
