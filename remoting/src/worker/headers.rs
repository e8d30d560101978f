//! Headers of an application's own file system, in files for the driver's compiler.

use std::{
    ffi::{CString, OsStr},
    fs, io,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use super::server::c_string;
use crate::protocol::{Blob, calls};

/// The most folders of a build.
const MOST_FOLDERS: u32 = 64;

/// The headers of one build. Their files go when this does.
#[derive(Debug)]
pub struct Headers {
    /// The folder that is made for them.
    pub root: PathBuf,
    /// How many folders are made in there.
    pub folders: u32,
    /// What goes into these.
    pub files: Vec<calls::HeaderFile>,
}

impl Drop for Headers {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

impl Headers {
    /// Writes the files, if there are any: the build's options with their folders, and what keeps
    /// the files.
    pub fn write(headers: Option<Self>, mut options: Blob) -> io::Result<(CString, Option<Self>)> {
        let Some(headers) = headers else {
            return Ok((c_string(&options), None));
        };
        if headers.folders > MOST_FOLDERS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // A zero would end the options before the folders.
        options.0.retain(|&byte| byte != 0);
        for folder in 0..headers.folders {
            let path = headers.root.join(folder.to_string());
            fs::create_dir_all(&path)?;
            options.0.extend(b" -I ");
            options.0.extend(path.as_os_str().as_bytes());
        }
        for file in &headers.files {
            let name = Path::new(OsStr::from_bytes(&file.name.0));
            let plain = |part| matches!(part, Component::Normal(_));
            // The client's claims: neither a step up nor another root.
            if file.folder >= headers.folders || !name.components().all(plain) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let path = headers.root.join(file.folder.to_string()).join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(path, &file.contents.0)?;
        }
        Ok((c_string(&options), Some(headers)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(folder: u32, name: &str) -> Headers {
        let root = std::env::temp_dir().join(format!("gantry-headers-{}", std::process::id()));
        let file = calls::HeaderFile {
            folder,
            name: Blob(name.as_bytes().to_vec()),
            contents: Blob(b"text".to_vec()),
        };
        Headers {
            root: root.join(name.replace(['/', '.'], "-")),
            folders: 2,
            files: vec![file],
        }
    }

    #[test]
    fn files_are_there_as_long_as_they_are_needed() {
        let options = Blob(b"-DX".to_vec());
        let (options, kept) = Headers::write(Some(headers(1, "a/b.h")), options).unwrap();
        let options = options.into_string().unwrap();
        let folder = options.rsplit(' ').next().unwrap().to_owned();
        assert!(options.starts_with("-DX -I ") && options.matches("-I").count() == 2);
        let file = Path::new(&folder).join("a/b.h");
        assert_eq!(fs::read(&file).unwrap(), b"text");
        drop(kept);
        assert!(!file.exists());
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let options = || Blob::default();
        for name in ["../x.h", "a/../../x.h", "/etc/x.h", "./x.h"] {
            assert!(
                Headers::write(Some(headers(0, name)), options()).is_err(),
                "{name}"
            );
        }
        assert!(Headers::write(Some(headers(2, "x.h")), options()).is_err());
    }
}
