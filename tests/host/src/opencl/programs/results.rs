//! Parses the reports of programs on their tests, each in its own format.

use std::collections::BTreeMap;

/// Results of tests by name: `pass`, possibly followed by details, or how else they ended.
pub type Results = BTreeMap<String, String>;

/// A test whose exit status tells whether it passes.
pub fn by_end(name: String, _: &str, good: bool) -> Results {
    let result = if good { "pass" } else { "fail" };
    Results::from([(name, result.to_owned())])
}

/// Piglit's tests report it in a line of JSON; the last one counts.
pub fn by_piglit(name: String, text: &str, _: bool) -> Results {
    let result = text
        .rsplit_once("\"result\": \"")
        .and_then(|(_, rest)| rest.split('"').next())
        .unwrap_or("no result");
    Results::from([(name, result.to_owned())])
}

/// CLBlast's tests print counts for each precision: `* Completed all test-cases for this routine.
/// Results:` and lines with `test(s) passed`, `skipped` and `failed`.
pub fn by_clblast(name: String, text: &str, good: bool) -> Results {
    let mut counts: [u64; 3] = [0; 3];
    for line in text.lines() {
        let plain: String =
            line.split("\u{1b}[")
                .enumerate()
                .fold(String::new(), |text, (index, part)| {
                    let part = match index {
                        0 => part,
                        _ => part.split_once('m').map_or(part, |(_, rest)| rest),
                    };
                    text + part
                });
        let number = plain
            .split_whitespace()
            .find_map(|word| word.parse::<u64>().ok());
        let kinds = ["test(s) passed", "test(s) skipped", "test(s) failed"];
        for (count, kind) in counts.iter_mut().zip(kinds) {
            if plain.contains(kind) {
                *count += number.unwrap_or(0);
            }
        }
    }
    let [passed, skipped, failed] = counts;
    let result = match (good, failed) {
        (true, 0) if passed > 0 => format!("pass ({passed} passed, {skipped} skipped)"),
        (true, 0) => "skip".to_owned(),
        _ => format!("fail ({passed} passed, {skipped} skipped, {failed} failed)"),
    };
    Results::from([(name, result)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(of: fn(String, &str, bool) -> Results, text: &str) -> Vec<(String, String)> {
        of("a".to_owned(), text, true).into_iter().collect()
    }

    #[test]
    fn the_output_of_each_kind_of_program_becomes_results() {
        let named = |result: &str| vec![("a".to_owned(), result.to_owned())];
        let piglit = "PIGLIT: {\"subtest\": {\"x\" : \"fail\"}}\nPIGLIT: {\"result\": \"pass\" }";
        assert_eq!(results(by_piglit, piglit), named("pass"));
        assert_eq!(results(by_piglit, "Killed"), named("no result"));
        let blas =
            "   \u{1b}[32m12\u{1b}[0m test(s) passed\n   3 test(s) skipped\n   0 test(s) failed";
        assert_eq!(
            results(by_clblast, blas),
            named("pass (12 passed, 3 skipped)")
        );
    }
}
