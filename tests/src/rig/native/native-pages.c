// SPDX-License-Identifier: GPL-2.0-only
/*
 * Device files of NVIDIA's major number, for hosts without its devices: their pages are the registers of QEMU's edu
 * device, mapped as a driver maps doorbells. There are no calls on them.
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>

#define NAME	"native-pages"
#define NVIDIA	195

static struct pci_dev *edu;

static int pages_mmap(struct file *file, struct vm_area_struct *vma)
{
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	return vm_iomap_memory(vma, pci_resource_start(edu, 0), pci_resource_len(edu, 0));
}

static const struct file_operations pages_ops = {
	.owner	= THIS_MODULE,
	.mmap	= pages_mmap,
};

static int __init pages_init(void)
{
	int ret;

	edu = pci_get_device(0x1234, 0x11e8, NULL);
	if (!edu)
		return -ENODEV;
	ret = pci_enable_device(edu);
	if (ret)
		goto put;
	ret = register_chrdev(NVIDIA, NAME, &pages_ops);
	if (!ret)
		return 0;
	pci_disable_device(edu);
put:
	pci_dev_put(edu);
	return ret;
}

static void __exit pages_exit(void)
{
	unregister_chrdev(NVIDIA, NAME);
	pci_disable_device(edu);
	pci_dev_put(edu);
}

module_init(pages_init);
module_exit(pages_exit);
MODULE_DESCRIPTION("Device files of NVIDIA's major number, for tests");
MODULE_LICENSE("GPL");
