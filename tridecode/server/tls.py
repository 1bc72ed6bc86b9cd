"""The files of https: a certificate and its key, and what is wrong with those that OpenSSL does not take."""

import shlex
import ssl
from dataclasses import dataclass

from ..errors import TridecodeError

# OpenSSL's reasons where a key is not its certificate's; the last one is that of another kind of key.
FOREIGN = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")


@dataclass(frozen=True)
class Tls:
    certificate: str
    key: str | None = None

    def check(self) -> None:
        """Raises TridecodeError. Nothing is asked on the terminal, as OpenSSL does for an encrypted key."""
        key = self.key or self.certificate
        for what, path in (("certificate", self.certificate), ("key", key)):
            try:
                open(path, "rb").close()
            except OSError as error:
                raise TridecodeError(f"the {what} {path} cannot be read: {error.strerror}; name another file") from None
        if not _certificates(self.certificate):
            raise _unread("certificate", self.certificate, "CERTIFICATE")
        asked: dict[str, str] = {}
        wrong: ssl.SSLError | None = None
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key, lambda: asked.setdefault("pass phrase", ""))
        except ssl.SSLError as error:
            wrong = error
        if asked:
            fix = f"openssl pkey -in {shlex.quote(key)} -out FILE writes it"
            raise TridecodeError(f"the key {key} is encrypted: expected one without a pass phrase; {fix}")
        if wrong is None:
            return
        if wrong.reason in FOREIGN:
            fix = "name the one with which that was made"
            raise TridecodeError(f"the key {key} does not belong to the certificate {self.certificate}; {fix}")
        if wrong.reason:
            why = f"cannot be used: {wrong.reason.replace('_', ' ').lower()}; make others"
            raise TridecodeError(f"the certificate {self.certificate} or its key {why}")
        raise _unread("key", key, "PRIVATE KEY", "" if self.key else ", or its own file as --ssl-keyfile")


def _unread(what: str, path: str, mark: str, more: str = "") -> TridecodeError:
    expected = f"expected a PEM file, with -----BEGIN {mark}----- to -----END {mark}-----{more}"
    return TridecodeError(f"no {what} can be read in {path}: {expected}")


def _certificates(path: str) -> int:
    """How many a file has; OpenSSL's error for none is the same as for a file without a key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        return 0
    return context.cert_store_stats()["x509"]
