//! Suggestions for misspelled names.

/// Maximum number of wrong letters in a name.
const MOST: usize = 3;

/// The name in `known` that is most similar to an unknown one, if any is similar enough.
pub fn nearest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // At most a third of the letters; more is not a typing error.
    let most = MOST.min(unknown.chars().count() / 3);
    let near = known
        .into_iter()
        .map(|name| (distance(unknown, name), name));
    let (_, name) = near.filter(|(distance, _)| *distance <= most).min()?;
    Some(name)
}

/// The number of letters that must be changed, added, removed, or swapped with their neighbor to turn one name into the
/// other (optimal string alignment distance).
fn distance(one: &str, other: &str) -> usize {
    // Longer names than any known one are never similar.
    const LONGEST: usize = 64;
    let (one, other): (Vec<_>, Vec<_>) = (one.chars().collect(), other.chars().collect());
    if one.len() > LONGEST || other.len() > LONGEST {
        return usize::MAX;
    }
    let mut before = vec![0; other.len() + 1];
    let mut last: Vec<_> = (0..=other.len()).collect();
    for row in 1..=one.len() {
        let mut line = vec![row; other.len() + 1];
        for column in 1..=other.len() {
            let differs = usize::from(one[row - 1] != other[column - 1]);
            line[column] = (last[column] + 1)
                .min(line[column - 1] + 1)
                .min(last[column - 1] + differs);
            let swapped = row > 1
                && column > 1
                && one[row - 1] == other[column - 2]
                && one[row - 2] == other[column - 1];
            if swapped {
                line[column] = line[column].min(before[column - 2] + 1);
            }
        }
        before = last;
        last = line;
    }
    last[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distance_counts_letters() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("pth", "path"), 1);
        assert_eq!(distance("ptah", "path"), 1);
    }
}
