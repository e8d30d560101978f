//! An error with its causes.

use std::{error::Error, fmt, iter};

/// Returns the causes of an error, outermost first, without the error itself.
pub fn causes<'a>(error: &'a (dyn Error + 'a)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    iter::successors(error.source(), |cause: &&'a (dyn Error + 'static)| {
        (*cause).source()
    })
}

/// Displays an error and its causes on one line for a log, outermost first, separated by colons. A
/// cause that only repeats the preceding text is left out.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a>(pub &'a (dyn Error + 'a));

impl Chain<'_> {
    /// Returns the texts of the error and of its causes. Consecutive duplicates are left out.
    pub fn texts(self) -> Vec<String> {
        let mut texts = vec![self.0.to_string()];
        for cause in causes(self.0) {
            let text = cause.to_string();
            if texts.last() != Some(&text) {
                texts.push(text);
            }
        }
        texts
    }
}

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.texts().join(": "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Failure(&'static str, Option<Box<Failure>>);

    impl fmt::Display for Failure {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Failure {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    fn failure() -> Failure {
        let inner = Failure("no such file", None);
        let same = Failure("cannot open the disk", Some(Box::new(inner)));
        let middle = Failure("cannot open the disk", Some(Box::new(same)));
        Failure("cannot make the machine", Some(Box::new(middle)))
    }

    #[test]
    fn an_error_is_printed_with_its_causes_outermost_first_and_each_once() {
        assert_eq!(
            Chain(&failure()).to_string(),
            "cannot make the machine: cannot open the disk: no such file"
        );
    }

    #[test]
    fn all_causes_are_named_without_the_error_itself() {
        let error = failure();
        let texts: Vec<_> = causes(&error).map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                "cannot open the disk",
                "cannot open the disk",
                "no such file"
            ]
        );
    }
}
