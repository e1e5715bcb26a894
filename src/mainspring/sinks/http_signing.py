"""Signatures after the Standard Webhooks specification."""

import base64
import hashlib
import hmac
from collections.abc import Sequence

from ..model.webhook import secret_key


class Signer:
    """Signs with every secret it has, so that receivers can change from one to the next."""

    def __init__(self, secrets: Sequence[str]) -> None:
        # Keyed once: a copy of a keyed hash costs a fraction of keying it.
        self._keyed = [hmac.new(secret_key(secret), digestmod=hashlib.sha256) for secret in secrets]

    def headers(self, key: str, timestamp_s: int, payload: bytes) -> dict[str, str]:
        """The three headers. The id is the idempotency key, the same for every attempt."""
        # A full stop separates what is signed: within the id it could be shifted from one part to the next.
        id = key.replace(".", "%2E")
        signed = f"{id}.{timestamp_s}.".encode() + payload
        return {
            "webhook-id": id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": " ".join(self._sign(keyed, signed) for keyed in self._keyed),
        }

    @staticmethod
    def _sign(keyed: "hmac.HMAC", signed: bytes) -> str:
        one = keyed.copy()
        one.update(signed)
        return "v1," + base64.b64encode(one.digest()).decode()
