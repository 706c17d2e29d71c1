"""Ends with 0 if this container answers at 127.0.0.1:PORT PATH with 200, over HTTP or TLS; what HEALTHCHECK runs."""

import http.client
import ssl
import sys


def answers(port: int, path: str) -> bool:
    """Whoever answers on loopback is this container itself, so its certificate is not asked for a name."""
    unchecked = ssl.create_default_context()
    unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
    for connection in (
        http.client.HTTPConnection("127.0.0.1", port, timeout=2),
        http.client.HTTPSConnection("127.0.0.1", port, timeout=2, context=unchecked),
    ):
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            continue  # the other way
        finally:
            connection.close()
    return False


if __name__ == "__main__":
    sys.exit(0 if answers(int(sys.argv[1]), sys.argv[2]) else 1)
