//! Facts about an entry point that the headers do not contain, from `annotations.txt`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};

/// Who waits for an entry point: `Class` in the definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Posted,
    Answered,
    Guest,
}

/// The annotations of one API.
#[derive(Debug, Default)]
pub struct Annotations {
    /// Names that must be served.
    pub wanted: BTreeSet<String>,
    /// Names whose class is not [`Class::Answered`].
    pub classes: BTreeMap<String, Class>,
    /// The rule of a parameter as Rust code, by entry point and parameter.
    pub rules: BTreeMap<(String, String), String>,
}

impl Annotations {
    /// Reads the section of an API.
    ///
    /// # Errors
    /// A line is not a valid annotation.
    pub fn read(text: &str, api: &str) -> Result<Self> {
        let mut all = Self::default();
        let mut inside = false;
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if let Some(section) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
                inside = section == api;
            } else if inside && !line.is_empty() {
                all.line(line)
                    .with_context(|| format!("annotations.txt, line {}", number + 1))?;
            }
        }
        ensure!(
            !all.wanted.is_empty(),
            "annotations.txt has no section [{api}]"
        );
        Ok(all)
    }

    fn line(&mut self, line: &str) -> Result<()> {
        let (first, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let names = rest.split_whitespace().map(str::to_owned);
        match first {
            "wanted" => self.wanted.extend(names),
            "posted" => self.classes.extend(names.map(|name| (name, Class::Posted))),
            "guest" => self.classes.extend(names.map(|name| (name, Class::Guest))),
            name => {
                for word in rest.split_whitespace() {
                    let (parameter, rule) = word
                        .split_once('=')
                        .with_context(|| format!("{word} is not parameter=rule"))?;
                    let rule = rule_in_rust(rule)?;
                    self.rules
                        .insert((name.to_owned(), parameter.to_owned()), rule);
                }
            }
        }
        Ok(())
    }

    /// Returns the class of a name.
    pub fn class(&self, name: &str) -> Class {
        self.classes.get(name).copied().unwrap_or(Class::Answered)
    }
}

fn rule_in_rust(rule: &str) -> Result<String> {
    Ok(match rule.split_once(':') {
        Some(("in", length)) => format!("Rule::In({length:?})"),
        Some(("out", length)) => format!("Rule::Out({length:?})"),
        Some(("inout", length)) => format!("Rule::InOut({length:?})"),
        None => match rule {
            "value" => "Rule::Value",
            "handle" => "Rule::Handle",
            "device" => "Rule::Device",
            "unified" => "Rule::Unified",
            "text" => "Rule::Text",
            "callback" => "Rule::Callback",
            _ => bail!("{rule} is no rule"),
        }
        .to_owned(),
        Some(_) => bail!("{rule} is no rule: in, out or inout before the colon"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_read_apart_and_forms_checked() {
        let text =
            "[driver]\nwanted a b # why\nposted a\nb p=in:count*2 q=unified\n[runtime]\nwanted c\n";
        let driver = Annotations::read(text, "driver").expect("it is well formed");
        assert_eq!(driver.wanted.len(), 2);
        assert_eq!(driver.class("a"), Class::Posted);
        assert_eq!(driver.class("b"), Class::Answered);
        let rule = &driver.rules[&("b".to_owned(), "p".to_owned())];
        assert_eq!(rule, "Rule::In(\"count*2\")");
        assert!(Annotations::read("[driver]\nwanted a\na p=sideways\n", "driver").is_err());
        assert!(Annotations::read(text, "cublas").is_err());
    }
}
