"""Whose request it is, and what they may do, as the guard found out."""

from __future__ import annotations

from starlette.requests import Request

from sdflow.serve.api_error import ApiError
from sdflow.serve.keys import Caller


def caller_of(request: Request) -> Caller:
    """Whose request it is."""
    caller: Caller = request.state.caller
    return caller


def require_admin(request: Request) -> None:
    """Raises ApiError for a request of those who only generate."""
    if not caller_of(request).administers:
        raise ApiError(403, "this takes a key of those who administer the server.", code="admin_key_required")
