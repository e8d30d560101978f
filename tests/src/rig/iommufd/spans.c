// SPDX-License-Identifier: GPL-2.0
/* What iommufd needs of the kernel's interval trees beyond what the kernel has built in. */
#include <linux/export.h>
#include <linux/interval_tree.h>

/* The rest of them is the kernel's to export. */
#undef EXPORT_SYMBOL_GPL
#define EXPORT_SYMBOL_GPL(name)

#include "lib/interval_tree.c"
