//! Headers from an application's own file system, written to files for the driver's compiler.

use std::{
    ffi::{CString, OsStr},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use remoting_proto::{apis::opencl::calls, wire::Blob};

use super::driver::c_string;

/// Maximum number of folders of a build.
const MOST_FOLDERS: u32 = 64;
/// Maximum number of files of a build, which is as many as the driver sends. The pool removes files
/// that a worker leaves behind.
const MOST_FILES: usize = 1024;
/// Maximum number of path components of a file's name.
const DEEPEST: usize = 64;

/// The headers of one build.
#[derive(Debug)]
pub struct Headers {
    /// The folder in which a folder for them is made. Its name is part of the options.
    pub root: PathBuf,
    /// How many folders are made in there.
    pub folders: u32,
    /// The files that go into these folders.
    pub files: Vec<calls::HeaderFile>,
}

/// Keeps the files of headers. They are removed when this is dropped.
#[derive(Debug)]
pub struct Kept(PathBuf);

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Headers {
    /// Writes the files, if there are any. Returns the build's options with their folders, and the
    /// owner of the files.
    pub fn write(headers: Option<Self>, mut options: Blob) -> io::Result<(CString, Option<Kept>)> {
        let Some(headers) = headers else {
            return Ok((c_string(&options), None));
        };
        if headers.folders > MOST_FOLDERS || headers.files.len() > MOST_FILES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // A zero would end the options before the folders.
        options.0.retain(|&byte| byte != 0);
        let kept = headers.folder()?;
        for folder in 0..headers.folders {
            let path = kept.0.join(folder.to_string());
            fs::create_dir_all(&path)?;
            options.0.extend(b" -I ");
            options.0.extend(path.as_os_str().as_bytes());
        }
        for file in &headers.files {
            let name = Path::new(OsStr::from_bytes(&file.name.0));
            let plain = |part| matches!(part, Component::Normal(_));
            // The name comes from the client: neither a parent folder nor an absolute path is
            // allowed.
            let deep = name.components().nth(DEEPEST).is_some();
            if file.folder >= headers.folders || deep || !name.components().all(plain) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            let path = kept.0.join(file.folder.to_string()).join(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(path, &file.contents.0)?;
        }
        Ok((c_string(&options), Some(kept)))
    }

    /// Makes the folder. It is named after its contents, because drivers that cache compiled
    /// programs include the options in the key. Concurrent builds of one program have a folder
    /// each.
    fn folder(&self) -> io::Result<Kept> {
        fs::create_dir_all(&self.root)?;
        let mut hasher = DefaultHasher::new();
        for file in &self.files {
            (file.folder, &file.name.0, &file.contents.0).hash(&mut hasher);
        }
        let name = hasher.finish();
        for number in 0.. {
            let path = self.root.join(format!("headers-{name:016x}-{number}"));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Kept(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
            // One for each build in progress, and possibly leftovers.
            if number == 1000 {
                break;
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
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
    fn the_same_headers_have_the_same_options_unless_both_are_there() {
        let write = |name| Headers::write(Some(headers(0, name)), Blob::default()).unwrap();
        let (first, kept) = write("same.h");
        let (second, also) = write("same.h");
        assert_ne!(first, second);
        drop((kept, also));
        assert_eq!(write("same.h").0, first);
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

    #[test]
    fn files_and_folders_without_a_bound_are_refused() {
        let steps = |count| vec!["d"; count].join("/");
        let write = |headers| Headers::write(Some(headers), Blob::default());
        assert!(write(headers(0, &steps(DEEPEST))).is_ok());
        assert!(write(headers(0, &steps(DEEPEST + 1))).is_err());
        let mut many = headers(0, "many.h");
        many.files = vec![many.files[0].clone(); MOST_FILES + 1];
        assert!(write(many).is_err());
    }
}
