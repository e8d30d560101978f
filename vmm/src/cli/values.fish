
# Keys, running VMMs and devices, which gantry itself knows; the rest is as above.
function __gantry_values
    gantry values -- (commandline --cut-at-cursor --current-process) 2>/dev/null
end
for option in @OPTIONS@
    complete --command gantry --long-option $option --require-parameter --arguments '(__gantry_values)'
end
complete --command gantry --condition 'string length --quiet (__gantry_values)' --no-files --arguments '(__gantry_values)'
