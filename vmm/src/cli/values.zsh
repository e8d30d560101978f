
# Keys, running VMMs and devices, which gantry itself knows; the rest is as above.
functions[_gantry_options]=$functions[_gantry]
_gantry() {
    local -a values
    values=("${(@f)$(gantry values -- "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    if [[ -z "$values" ]]; then
        _gantry_options "$@"
        return
    fi
    # A key's value follows it without a space.
    compadd -S '' -- ${(M)values:#*=}
    compadd -- ${values:#*=}
}
