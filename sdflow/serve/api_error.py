"""API errors: an HTTP status with an error body in OpenAI's format."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from sdflow import errors
from sdflow.serve.jobs import Failed

KINDS = {
    **dict.fromkeys((400, 405, 408, 409, 413), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Error `type` by status; any other status is a `server_error`."""

CODES = {
    400: "invalid_value",
    404: "not_found",
    405: "method_not_allowed",
    499: "client_closed_request",
    500: "server_error",
}
"""Default error `code` by status."""


class ApiError(HTTPException):
    """A rejected request. message: what is wrong and how to fix it. param: the invalid field. code: machine-readable,
    listed in docs/reference/errors.md. retry_after: seconds until a retry makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        super().__init__(status, message, headers | ({"WWW-Authenticate": "Bearer"} if status == 401 else {}))
        self.status, self.message, self.param, self.code = status, message, param, code or CODES.get(status)

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the JSON body in OpenAI's format, or in the webui's for paths of A1111's API."""
        if path.startswith(("/sdapi/", "/controlnet/")):
            return {"error": "HTTPException", "detail": self.message, "body": "", "errors": self.message}
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """Return the error for an invalid field value."""
    return ApiError(400, message, param=param, code=code)


PARAMS = {
    "num_inference_steps": "steps",
    "--scheduler": "scheduler",
    "mask_image": "mask",
    "height": "size",
    "width": "size",
}
"""Argument name of a pipeline call -> request field."""

NO_MEMORY = ("allocate memory", "bad_alloc")
"""Fragments of the out-of-memory messages of ONNX Runtime and torch."""


def of_failure(failed: Failed) -> ApiError:
    """Return the response error for an image that failed."""
    said = f"{failed.what}. {failed.remedy}" if failed.remedy else failed.what
    if failed.kind == "CheckpointError":  # a LoRA's: leave its path out
        return invalid("loras", f"a LoRA of this request {failed.what}.", code="invalid_lora")
    if failed.kind == "UsageError":
        return invalid(PARAMS.get(failed.where or "", failed.where), said)
    if failed.kind == "ReplicaLost":
        return ApiError(503, f"Generation failed: {said}.", code="replica_lost", retry_after=5)
    if failed.kind in ("MemoryError", "OutOfMemoryError") or any(each in failed.what for each in NO_MEMORY):
        words = "Not enough memory for this image; request a smaller size."
        return ApiError(503, words, code="out_of_memory", retry_after=5)
    if not hasattr(errors, failed.kind):  # unexpected messages may contain server paths
        said = "see the server's log"
    return ApiError(500, f"Generation failed: {said}.", code=failed.kind)
