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

/// Pytest's summary has a line for each variant of a test: `PASSED file::test[variant]`, and one
/// for all skipped ones with the reason. The worst result counts.
pub fn by_pytest(name: String, text: &str, _: bool) -> Results {
    let kinds = [
        ("ERROR ", "error"),
        ("FAILED ", "fail"),
        ("PASSED ", "pass"),
        ("SKIPPED ", "skip"),
    ];
    let found = kinds
        .into_iter()
        .find(|(kind, _)| text.lines().any(|line| line.starts_with(kind)));
    let result = found.map_or("no result", |(_, result)| result);
    Results::from([(name, result.to_owned())])
}

/// x264 continues without OpenCL if it finds no suitable device, and says so. Its encoded video,
/// whose checksum is the result here, depends on what the device found.
pub fn by_x264(name: String, text: &str, good: bool) -> Results {
    let said = text.lines().find(|line| line.contains("OpenCL"));
    let sum = text.lines().find_map(|line| line.strip_suffix("  -"));
    let result = match (good, said, sum) {
        (true, Some(line), Some(sum)) if line.contains("acceleration enabled") => {
            format!("pass (SHA-256 {}...)", sum.get(..16).unwrap_or(sum))
        }
        (_, Some(line), _) => line.trim_start_matches("x264 ").to_owned(),
        _ => "fail".to_owned(),
    };
    Results::from([(name, result)])
}

/// hashcat tests its kernels before it uses them and gives up if one fails; otherwise, it finds the
/// password of the example.
pub fn by_hashcat(name: String, text: &str, good: bool) -> Results {
    let status = text
        .lines()
        .find_map(|line| line.strip_prefix("Status...........: "));
    // The reason for giving up precedes the start and end times.
    let complaint = text
        .lines()
        .rfind(|line| !line.trim().is_empty() && !line.starts_with("St"));
    let result = match (good, status) {
        (true, Some("Cracked")) => "pass",
        _ => status.or(complaint).unwrap_or("nothing said"),
    };
    Results::from([(name, result.to_owned())])
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
        let python = "PASSED test_a.py::one[0]\nFAILED test_a.py::one[1] - no\nSKIPPED [1] a: b";
        assert_eq!(results(by_pytest, python), named("fail"));
        let without = "SKIPPED [1] test_a.py:7: not on this device";
        assert_eq!(results(by_pytest, without), named("skip"));
        assert_eq!(results(by_pytest, "Fatal Python error"), named("no result"));
        let video = "x264 [info]: OpenCL acceleration enabled with A B\n0123456789abcdef01  -";
        assert_eq!(
            results(by_x264, video),
            named("pass (SHA-256 0123456789abcdef...)")
        );
        let without = "x264 [warning]: OpenCL: no device\n0123456789abcdef01  -";
        assert_eq!(
            results(by_x264, without),
            named("[warning]: OpenCL: no device")
        );
        let found = "Session..........: hashcat\nStatus...........: Cracked\n";
        assert_eq!(results(by_hashcat, found), named("pass"));
    }
}
