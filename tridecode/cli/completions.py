"""What the shell completes after options: files, directories, sessions, models in the Hugging Face cache."""

# Ids of models, without starting Python. Only what bash expands to nothing else; no single quotes, which fish puts
# around it.
CACHED = (
    'ls -d "${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub}"/models--*--* 2>/dev/null'
    r' | sed -n "s|.*/models--\([A-Za-z0-9._-]*\)--\([A-Za-z0-9._-]*\)\$|\1/\2|p"'
)
MODELS = {
    "bash": "_tridecode_models",
    "zsh": "_tridecode_models",
    "fish": "(__tridecode_models)",
    "tcsh": "d",
    "preamble": {
        "bash": f'_tridecode_models() {{\n  compgen -d -- $1\n  compgen -W "bundled $({CACHED})" -- $1\n}}',
        "zsh": f"_tridecode_models() {{\n  compadd -- bundled $({CACHED})\n  _files -/\n}}",
        "fish": f"function __tridecode_models\n  echo bundled\n  sh -c '{CACHED}'\n  __fish_complete_directories\nend",
    },
}


def kinds() -> dict:
    """Metavar -> what stands there, as shtab has it."""
    import shtab  # here, because nothing else needs it

    sessions = shtab.cmd("tridecode sessions --names 2>/dev/null")
    return {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "DIR_OR_ID": MODELS, "SESSION": sessions}
