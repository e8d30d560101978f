//! Objects by the numbers that the client chose.

/// The largest number: what a client can make the table's memory grow to.
const LARGEST: u32 = 1 << 20;
/// Clients choose small numbers first, from two ranges at most. A table grows by so many entries
/// or doubles: its memory is in proportion to what was made.
const STEP: usize = 8192;

/// An object, or why it could not be made.
#[derive(Debug)]
enum Slot<T> {
    Empty,
    /// With how many have been put into the table by now, itself included.
    There(T, u64),
    Failed(i32),
}

/// A dense table: finding an object is an index.
#[derive(Debug)]
pub struct Table<T> {
    slots: Vec<Slot<T>>,
    /// The code for a number under which there is nothing.
    invalid: i32,
    /// Numbers are below this.
    end: u32,
    /// How many objects were put into it.
    births: u64,
}

impl<T> Table<T> {
    /// A table in which a number without object is answered by `invalid`.
    pub fn new(invalid: i32) -> Self {
        Self {
            slots: Vec::new(),
            invalid,
            end: LARGEST,
            births: 0,
        }
    }

    /// The same for numbers below `end` only, which is not above the largest number that there is.
    #[must_use]
    pub fn up_to(self, end: u32) -> Self {
        Self { end, ..self }
    }

    /// The object, or the code that says why there is none.
    pub fn get(&self, id: u32) -> Result<&T, i32> {
        match self.slots.get(id as usize) {
            Some(Slot::There(object, _)) => Ok(object),
            Some(Slot::Failed(code)) => Err(*code),
            _ => Err(self.invalid),
        }
    }

    /// What tells the object of this number from those that had it before and will have it: 0 if
    /// there is none.
    pub fn birth(&self, id: u32) -> u64 {
        match self.slots.get(id as usize) {
            Some(Slot::There(_, birth)) => *birth,
            _ => 0,
        }
    }

    /// The object, to change it.
    pub fn get_mut(&mut self, id: u32) -> Result<&mut T, i32> {
        match self.slots.get_mut(id as usize) {
            Some(Slot::There(object, _)) => Ok(object),
            Some(Slot::Failed(code)) => Err(*code),
            _ => Err(self.invalid),
        }
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().filter_map(|slot| match slot {
            Slot::There(object, _) => Some(object),
            Slot::Empty | Slot::Failed(_) => None,
        })
    }

    /// All objects, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|slot| match slot {
            Slot::There(object, _) => Some(object),
            Slot::Empty | Slot::Failed(_) => None,
        })
    }

    /// All numbers that are in use, in their order: the objects, or why they could not be made.
    pub fn entries(&self) -> impl Iterator<Item = (u32, Result<&T, i32>)> {
        (0..).zip(&self.slots).filter_map(|(id, slot)| match slot {
            Slot::There(object, _) => Some((id, Ok(object))),
            Slot::Failed(code) => Some((id, Err(*code))),
            Slot::Empty => None,
        })
    }

    /// Gives the objects other numbers: pairs of what they have and what they get. Those without a
    /// new number come back, and so do those whose new number cannot be.
    pub fn renumber(&mut self, pairs: &[(u32, u32)]) -> Vec<T> {
        let mut old = std::mem::take(&mut self.slots);
        let mut pairs = pairs.to_vec();
        pairs.sort_by_key(|(_, to)| *to);
        let mut left = Vec::new();
        for (from, to) in pairs {
            let slot = old.get_mut(from as usize);
            let slot = slot.map(|slot| std::mem::replace(slot, Slot::Empty));
            if let Some(Slot::There(object, _)) = slot {
                left.extend(self.put(to, Ok(object)));
            }
        }
        left.extend(old.into_iter().filter_map(|slot| match slot {
            Slot::There(object, _) => Some(object),
            Slot::Empty | Slot::Failed(_) => None,
        }));
        left
    }

    /// Whether a client may give an object this number now.
    pub fn check(&self, id: u32) -> Result<(), i32> {
        let free = matches!(self.slots.get(id as usize), None | Some(Slot::Empty));
        if free && self.reaches(id) {
            Ok(())
        } else {
            Err(self.invalid)
        }
    }

    fn reaches(&self, id: u32) -> bool {
        id < self.end && (id as usize) < 2 * self.slots.len() + STEP
    }

    /// Puts an object under its number, or the reason why it could not be made. What was there
    /// comes back.
    pub fn put(&mut self, id: u32, object: Result<T, i32>) -> Option<T> {
        if !self.reaches(id) {
            return object.ok();
        }
        let index = id as usize;
        if index >= self.slots.len() {
            self.slots.resize_with(index + 1, || Slot::Empty);
        }
        let slot = match object {
            Ok(object) => {
                self.births += 1;
                Slot::There(object, self.births)
            }
            Err(code) => Slot::Failed(code),
        };
        match std::mem::replace(&mut self.slots[index], slot) {
            Slot::There(old, _) => Some(old),
            _ => None,
        }
    }

    /// Takes an object out, so that its number is free again.
    pub fn take(&mut self, id: u32) -> Option<T> {
        match std::mem::replace(self.slots.get_mut(id as usize)?, Slot::Empty) {
            Slot::There(object, _) => Some(object),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_beyond_the_bound_takes_no_memory() {
        let mut table = Table::new(-38);
        assert_eq!(table.check(u32::MAX), Err(-38));
        assert_eq!(table.put(u32::MAX, Ok(7)), Some(7));
        assert_eq!(table.check(STEP as u32), Err(-38));
        assert!(table.slots.is_empty());
        table.put(STEP as u32 - 1, Ok(7));
        assert_eq!(table.check(STEP as u32), Ok(()));
    }

    #[test]
    fn a_table_for_few_objects_has_no_more() {
        let mut table = Table::new(-34).up_to(2);
        assert_eq!(table.check(1), Ok(()));
        assert_eq!(table.check(2), Err(-34));
        assert_eq!(table.put(2, Ok(7)), Some(7));
    }

    #[test]
    fn an_object_that_could_not_be_made_answers_with_its_reason_until_it_is_released() {
        let mut table: Table<()> = Table::new(-38);
        table.put(3, Err(-4));
        assert_eq!(table.get(3), Err(-4));
        table.take(3);
        assert_eq!(table.get(3), Err(-38));
        assert_eq!(table.check(3), Ok(()));
    }

    #[test]
    fn a_number_in_use_cannot_be_given_again() {
        let mut table = Table::new(-38);
        table.put(1, Ok(5));
        assert_eq!(table.check(1), Err(-38));
    }
}
