//! Prometheus' text format, version 0.0.4.

/// Appends the labels of a sample: names, which are plain, and values, which may be anything. Nothing if there are none.
pub fn labels(text: &mut String, labels: &[(&str, &str)]) {
    for (index, (label, value)) in labels.iter().enumerate() {
        text.push(if index == 0 { '{' } else { ',' });
        text.push_str(label);
        text.push_str("=\"");
        for character in value.chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                '"' => text.push_str("\\\""),
                '\n' => text.push_str("\\n"),
                other => text.push(other),
            }
        }
        text.push('"');
    }
    if !labels.is_empty() {
        text.push('}');
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn values_of_labels_cannot_end_them() {
        let mut text = String::from("a");
        super::labels(&mut text, &[("b", "\"}\n\\"), ("c", "")]);
        assert_eq!(text, r#"a{b="\"}\n\\",c=""}"#);
        super::labels(&mut text, &[]);
        assert!(text.ends_with('}'));
    }
}
