
# Keys, running VMMs and devices, which gantry itself knows; the rest is as above.
_gantry_values() {
    local line="${COMP_LINE:0:COMP_POINT}" word values kept
    word="${line##* }"
    mapfile -t values < <(gantry values -- "$line" 2>/dev/null)
    if [ ${#values[@]} -eq 0 ]; then
        _gantry "$@"
        return
    fi
    # Bash replaces what follows the last of its separators.
    kept="${word%"${word##*[=:]}"}"
    COMPREPLY=("${values[@]#"$kept"}")
    case "${values[0]}" in *=) compopt -o nospace ;; esac
}
complete -F _gantry_values -o bashdefault -o default gantry
