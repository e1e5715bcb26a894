"""A secret in a file of its own, which a setting or a named target names."""

from pathlib import Path

from .model.errors import InvalidInput


def read_secret(path: object) -> str:
    """What the file holds, without the space around it. InvalidInput says what is wrong with it, and what to do."""
    if not isinstance(path, str):
        raise InvalidInput(f"expected the name of a file, not {path!r}")
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path}: {error.strerror}; write the secret there, readable for us, or name another file"
        ) from None
    except UnicodeDecodeError:
        raise InvalidInput(f"cannot read {path}: it is no text in UTF-8; write the secret into it as text") from None
    except (ValueError, RuntimeError) as error:  # a name that cannot be one of a file, or a home that nobody has
        raise InvalidInput(f"cannot read {path!r}: {error}; name another file") from None
    if not text:
        raise InvalidInput(f"the file {path} is empty; write the secret into it, or do not name it")
    return text
