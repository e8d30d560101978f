//! Known differences between the native results of a test and those through Gantry.

/// A difference and its reason.
struct Known {
    /// The test's name, as in the table.
    test: &'static str,
    /// Part of the name of the host's platform.
    platform: &'static str,
    natively: &'static str,
    through: &'static str,
    why: &'static str,
}

impl Known {
    const fn new(
        platform: &'static str,
        test: &'static str,
        [natively, through]: [&'static str; 2],
        why: &'static str,
    ) -> Self {
        Self {
            test,
            platform,
            natively,
            through,
            why,
        }
    }
}

const POCL: &str = "PoCL 3.1";
const NVIDIA: &str = "CUDA";

/// The reason for a test that makes invalid calls on purpose.
const LOOKS: &str = "NVIDIA's driver answers one of the test's wrong calls otherwise than OpenCL \
                     says; Gantry's looks before it passes a call on";
/// The same for a test that then prints nothing more.
const ENDS: &str = "NVIDIA's driver ends the process in one of the test's wrong calls; Gantry's looks \
                    before it passes a call on";

const KNOWN: &[Known] = &[
    Known::new(
        POCL,
        "cl-api-create-command-queue -auto",
        ["no result", "pass"],
        "PoCL ends the process when a queue on the device is asked for; Gantry's driver refuses it",
    ),
    Known::new(
        NVIDIA,
        "cl-api-create-buffer -auto",
        ["fail", "pass"],
        LOOKS,
    ),
    Known::new(
        NVIDIA,
        "cl-api-create-context -auto",
        ["no result", "pass"],
        ENDS,
    ),
    Known::new(
        NVIDIA,
        "cl-api-create-context-from-type -auto",
        ["fail", "pass"],
        LOOKS,
    ),
    Known::new(
        NVIDIA,
        "cl-api-enqueue-fill-buffer -auto",
        ["no result", "pass"],
        ENDS,
    ),
    Known::new(
        NVIDIA,
        "cl-api-enqueue-fill-image -auto",
        ["no result", "pass"],
        ENDS,
    ),
    Known::new(
        NVIDIA,
        "cl-api-enqueue-map-buffer -auto",
        ["fail", "pass"],
        LOOKS,
    ),
    Known::new(
        NVIDIA,
        "cl-api-enqueue-migrate-mem-objects -auto",
        ["fail", "pass"],
        LOOKS,
    ),
    Known::new(
        NVIDIA,
        "cl-api-enqueue-read_write-buffer -auto",
        ["fail", "pass"],
        LOOKS,
    ),
    Known::new(
        NVIDIA,
        "cl-api-get-device-ids -auto",
        ["fail", "pass"],
        LOOKS,
    ),
    Known::new(
        NVIDIA,
        "cl-api-link-program -auto",
        ["no result", "fail"],
        "what is linked ends the process that does it: the application's natively, the worker's \
         through Gantry",
    ),
    Known::new(
        NVIDIA,
        "cl-api-set-kernel-arg -auto",
        ["fail", "pass"],
        LOOKS,
    ),
];

/// Why this test has these results natively and through Gantry on this platform; `None` if the
/// reason is unknown so far.
pub fn why(platform: &str, test: &str, natively: &str, through: &str) -> Option<&'static str> {
    let known = KNOWN.iter().find(|known| {
        platform.contains(known.platform)
            && (known.test, known.natively, known.through) == (test, natively, through)
    });
    known.map(|known| known.why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_difference_is_known() {
        let (platform, test) = (
            "OpenCL 3.0 PoCL 3.1+debian",
            "cl-api-create-command-queue -auto",
        );
        assert!(why(platform, test, "no result", "pass").is_some());
        assert_eq!(
            why("OpenCL 3.0 CUDA 13.0.98", test, "no result", "pass"),
            None
        );
        assert_eq!(why(platform, test, "pass", "no result"), None);
        assert_eq!(
            why(platform, "cl-api-create-command-queue", "no result", "pass"),
            None
        );
    }
}
