//! Checks that links between the repository's documents lead somewhere, and that workflows run commands that exist.

use std::path::{Path, PathBuf};

use clap::Parser;

/// Targets of the links in a Markdown text, without anchors and without links to other sites. Code
/// is skipped, since a C++ lambda looks like a link.
fn targets(text: &str) -> Vec<&str> {
    let mut code = false;
    let lines = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    });
    // Text between backquotes is code, too.
    let prose = lines.flat_map(|line| line.split('`').step_by(2));
    prose
        .flat_map(|prose| prose.split("](").skip(1))
        .filter_map(|rest| {
            let target = rest.split([')', ' ']).next()?;
            let file = target.split('#').next()?;
            (!file.is_empty() && !target.contains("://")).then_some(file)
        })
        .collect()
}

/// Finds all Markdown files below a directory, except built or fetched ones.
fn documents(folder: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if entry.file_type()?.is_dir() {
            if name != "target" && !name.starts_with('.') {
                documents(&entry.path(), found)?;
            }
        } else if name.ends_with(".md") {
            found.push(entry.path());
        }
    }
    Ok(())
}

#[test]
fn links_of_the_documents_lead_to_files() {
    let mut found = Vec::new();
    documents(&crate::programs::root(), &mut found).unwrap();
    assert!(found.len() > 5, "{found:?}");
    let mut broken = Vec::new();
    for document in &found {
        let text = std::fs::read_to_string(document).unwrap();
        let folder = document.parent().unwrap();
        broken.extend(
            targets(&text)
                .into_iter()
                .filter(|target| !folder.join(target).exists())
                .map(|target| format!("{}: {target}", document.display())),
        );
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn a_link_to_another_site_is_no_file_and_an_anchor_is_no_part_of_one() {
    let text =
        "[a](b.md#c) [d](https://e.org/f) [g](#h) ![i](j.svg) `[=](int n)`\n```\n[](k)\n```\n";
    assert_eq!(targets(text), ["b.md", "j.svg"]);
}

/// The commands that a workflow runs, one a step.
fn commands(workflow: &str) -> Vec<&str> {
    let lines = workflow
        .lines()
        .map(|line| line.trim().trim_start_matches("- "));
    lines
        .filter_map(|line| line.strip_prefix("run: "))
        .collect()
}

#[test]
fn each_step_of_a_workflow_is_a_command_of_this_program() {
    let folder = crate::programs::root().join(".github/workflows");
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        for command in commands(&text) {
            let words = command.strip_prefix("cargo xtask ");
            let words = words.unwrap_or_else(|| panic!("{}: {command}", path.display()));
            let words = std::iter::once("xtask").chain(words.split(' '));
            crate::Arguments::try_parse_from(words)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            count += 1;
        }
    }
    assert!(count >= 3, "{count} commands");
}

#[test]
fn a_step_of_several_commands_is_not_overlooked() {
    let text =
        "steps:\n  - uses: a\n  - run: cargo xtask test\n  - name: b\n    run: |\n      ls\n";
    assert_eq!(commands(text), ["cargo xtask test", "|"]);
}
