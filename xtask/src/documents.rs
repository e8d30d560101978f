//! Checks that links between the repository's documents lead somewhere, that `docs/README.md` lists all pages and its
//! guides are short, and that workflows run commands that exist.

use std::path::{Path, PathBuf};

use clap::Parser;

/// Most words of a guide.
const GUIDE_WORDS: usize = 1200;

/// Lines of a Markdown text that are not in a block of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut code = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        !code && !fence
    })
}

/// A link to a file of the repository, or within a document.
#[derive(Debug, Eq, PartialEq)]
struct Target<'a> {
    /// Path relative to the document's folder; empty for the document itself.
    file: &'a str,
    /// The part after `#`, or empty.
    anchor: &'a str,
}

/// Targets of the links in a Markdown text, without links to other sites. Code is skipped, since a C++ lambda looks
/// like a link.
fn targets(text: &str) -> Vec<Target<'_>> {
    // Text between backquotes is code, too.
    prose(text)
        .flat_map(|line| line.split('`').step_by(2))
        .flat_map(|prose| prose.split("](").skip(1))
        .filter_map(|rest| {
            let target = rest.split([')', ' ']).next()?;
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            (!target.is_empty() && !target.contains("://")).then_some(Target { file, anchor })
        })
        .collect()
}

/// Anchors of a document's headings, as forges make them: letters, digits, `-` and `_`, with a number for the second
/// and later headings of one text.
fn anchors(text: &str) -> Vec<String> {
    let mut found = Vec::<String>::new();
    for line in prose(text).filter(|line| line.starts_with('#')) {
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        let kept = |letter: &char| letter.is_alphanumeric() || " -_".contains(*letter);
        let anchor = heading.chars().filter(kept).collect::<String>();
        let anchor = anchor.replace(' ', "-");
        let numbered = (1..).map(|number| format!("{anchor}-{number}"));
        let free = std::iter::once(anchor.clone())
            .chain(numbered)
            .find(|anchor| !found.contains(anchor));
        found.extend(free);
    }
    found
}

/// Says what is wrong with a link of the document `from`; nothing if it leads somewhere.
fn broken(from: &Path, text: &str, target: &Target) -> Option<String> {
    let Target { file, anchor } = target;
    let path = match file.is_empty() {
        true => from.to_owned(),
        false => from.parent()?.join(file),
    };
    let place = from.display();
    if !path.exists() {
        return Some(format!("{place}: no file {file}"));
    }
    if anchor.is_empty() || path.extension().is_none_or(|extension| extension != "md") {
        return None;
    }
    let other = std::fs::read_to_string(&path).ok();
    let known = anchors(if file.is_empty() {
        text
    } else {
        other.as_deref()?
    });
    (!known.iter().any(|known| known == anchor))
        .then(|| format!("{place}: no heading {file}#{anchor}"))
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
fn links_of_the_documents_lead_to_files_and_headings() {
    let mut found = Vec::new();
    documents(&gantry_build::root(), &mut found).unwrap();
    assert!(found.len() > 5, "{found:?}");
    let mut wrong = Vec::new();
    for document in &found {
        let text = std::fs::read_to_string(document).unwrap();
        let links = targets(&text);
        wrong.extend(
            links
                .iter()
                .filter_map(|link| broken(document, &text, link)),
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn targets_are_files_and_anchors_of_the_repository() {
    let text =
        "[a](b.md#c) [d](https://e.org/f) [g](#h) ![i](j.svg) `[=](int n)`\n```\n[](k)\n```\n";
    let found = targets(text);
    let found: Vec<_> = found.iter().map(|link| (link.file, link.anchor)).collect();
    assert_eq!(found, [("b.md", "c"), ("", "h"), ("j.svg", "")]);
}

#[test]
fn anchors_are_those_that_a_forge_makes_of_headings() {
    let text = "# Keys of `--accel`\n```\n# no\n```\n## A VM's, or\n## One\n## One\n";
    let expected = ["keys-of---accel", "a-vms-or", "one", "one-1"];
    assert_eq!(anchors(text), expected);
}

#[test]
fn a_link_without_its_file_or_heading_is_reported() {
    let from = gantry_build::root().join("docs/README.md");
    let wrong = |file, anchor| broken(&from, "# One\n", &Target { file, anchor });
    assert_eq!(wrong("", "one"), None);
    assert_eq!(wrong("dev/glossary.md", "glossary"), None);
    assert!(wrong("", "two").is_some_and(|error| error.ends_with("no heading #two")));
    let error = wrong("dev/glossary.md", "one");
    assert!(error.is_some_and(|error| error.ends_with("no heading dev/glossary.md#one")));
    assert!(wrong("none.md", "").is_some_and(|error| error.ends_with("no file none.md")));
}

#[test]
fn each_page_of_the_documentation_is_in_its_contents() {
    let folder = gantry_build::root().join("docs");
    let contents = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let listed: Vec<_> = targets(&contents)
        .iter()
        .map(|link| folder.join(link.file))
        .collect();
    let mut pages = Vec::new();
    documents(&folder, &mut pages).unwrap();
    pages.retain(|page| *page != folder.join("README.md") && !listed.contains(page));
    assert!(pages.is_empty(), "add these to docs/README.md: {pages:?}");
}

#[test]
fn a_guide_has_at_most_1200_words() {
    let folder = gantry_build::root().join("docs");
    let contents = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let (_, guides) = contents.split_once("\n## Guides\n").unwrap();
    let (guides, _) = guides.split_once("\n## ").unwrap();
    let guides = targets(guides);
    assert!(guides.len() > 15, "{guides:?}");
    for Target { file, .. } in &guides {
        let words = std::fs::read_to_string(folder.join(file)).unwrap();
        let words = words.split_whitespace().count();
        assert!(
            words <= GUIDE_WORDS,
            "{file} has {words} words: move a part to another page"
        );
    }
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
    let folder = gantry_build::root().join(".github/workflows");
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
