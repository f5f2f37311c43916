"""A cache that machines share, or take along: what one has built, the others fetch. Any URL that fsspec reads, or a zip file.

PREFIX/sdflow-v1/pieces/ab/<sha256>           a part of a file, named by its content
                 objects/ab/<tree digest>     the manifest: the files, and the pieces of each
                 actions/ab/<action digest>   the commit point: this action gave that object
                 signatures/ab/<sha256>.sig   by OpenSSF Model Signing, of the action's file with this content
                 verified/ab/<tree digest>…   who says to have verified it, and on which versions
                 structures.json              what `sdflow cache export` wrote here

What can be seen is whole: pieces go up first, then the manifest, the action last. What comes down is believed by its digest
alone. So a remote can be slow, gone, wrong or hostile, and costs time at most.
"""

from sdflow.store.remote.remote import Remote
from sdflow.store.remote.spec import RemoteSpec, remote_from_environment
from sdflow.store.remote.trust import Claim

__all__ = ["Claim", "Remote", "RemoteSpec", "remote_from_environment"]
