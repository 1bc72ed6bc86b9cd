"""Checks of the certificate and the key for https, with precise errors for files that OpenSSL rejects."""

import shlex
import ssl
from dataclasses import dataclass

from ..errors import TridecodeError

# OpenSSL's reasons for a key that does not belong to the certificate. The last one reports a key of another algorithm.
WRONG_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")


@dataclass(frozen=True)
class Tls:
    """Paths of a certificate and of its key in PEM; without `key` the certificate's file contains both."""

    certificate: str
    key: str | None = None

    def check(self) -> None:
        """Check that both files can be used.

        The callback for the passphrase prevents OpenSSL from requesting one on the terminal.

        Raises:
            TridecodeError: a file cannot be read, or the key does not belong to the certificate.
        """
        key = self.key or self.certificate
        for kind, path in (("certificate", self.certificate), ("key", key)):
            try:
                open(path, "rb").close()
            except OSError as error:
                raise TridecodeError(f"the {kind} {path} cannot be read: {error.strerror}; name another file") from None
        if not _certificates(self.certificate):
            raise _unreadable("certificate", self.certificate, "CERTIFICATE")
        pass_phrases: dict[str, str] = {}  # The dict is filled if OpenSSL needs a passphrase.
        wrong: ssl.SSLError | None = None
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key, lambda: pass_phrases.setdefault("pass phrase", ""))
        except ssl.SSLError as error:
            wrong = error
        if pass_phrases:
            fix = f"openssl pkey -in {shlex.quote(key)} -out FILE decrypts it"
            raise TridecodeError(f"the key {key} is encrypted: expected one without a pass phrase; {fix}")
        if wrong is None:
            return
        if wrong.reason in WRONG_KEY:
            fix = "name the key that the certificate was made with"
            raise TridecodeError(f"the key {key} does not belong to the certificate {self.certificate}; {fix}")
        if wrong.reason:
            why = f"cannot be used: {wrong.reason.replace('_', ' ').lower()}; create new ones"
            raise TridecodeError(f"the certificate {self.certificate} or its key {why}")
        raise _unreadable("key", key, "PRIVATE KEY", "" if self.key else ", or its own file as --ssl-keyfile")


def _unreadable(kind: str, path: str, label: str, hint: str = "") -> TridecodeError:
    expected = f"expected a PEM file, with -----BEGIN {label}----- to -----END {label}-----{hint}"
    return TridecodeError(f"no {kind} can be read in {path}: {expected}")


def _certificates(path: str) -> int:
    """Count the certificates of a file; OpenSSL reports a missing certificate and a missing key by the same error."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        return 0
    return context.cert_store_stats()["x509"]
