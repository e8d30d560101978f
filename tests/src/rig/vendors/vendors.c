// SPDX-License-Identifier: GPL-2.0-only
/*
 * A variant of vfio-pci, as vendors have them for their devices: its own name, and the kernel's core
 * for all the rest. As some of theirs do, it can refuse to give a device away.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/vfio.h>
#include <linux/vfio_pci_core.h>

static bool withhold;
module_param(withhold, bool, 0644);
MODULE_PARM_DESC(withhold, "give no device to anybody");

static int vendors_open_device(struct vfio_device *core_vdev)
{
	struct vfio_pci_core_device *vdev =
		container_of(core_vdev, struct vfio_pci_core_device, vdev);
	int ret;

	if (withhold)
		return -ENODEV;
	ret = vfio_pci_core_enable(vdev);
	if (ret)
		return ret;
	vfio_pci_core_finish_enable(vdev);
	return 0;
}

static const struct vfio_device_ops vendors_ops = {
	.name		= "vendors-vfio",
	.init		= vfio_pci_core_init_dev,
	.release	= vfio_pci_core_release_dev,
	.open_device	= vendors_open_device,
	.close_device	= vfio_pci_core_close_device,
	.ioctl		= vfio_pci_core_ioctl,
	.device_feature	= vfio_pci_core_ioctl_feature,
	.read		= vfio_pci_core_read,
	.write		= vfio_pci_core_write,
	.mmap		= vfio_pci_core_mmap,
	.request	= vfio_pci_core_request,
	.match		= vfio_pci_core_match,
};

static int vendors_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct vfio_pci_core_device *vdev;
	int ret;

	vdev = vfio_alloc_device(vfio_pci_core_device, vdev, &pdev->dev, &vendors_ops);
	if (IS_ERR(vdev))
		return PTR_ERR(vdev);
	dev_set_drvdata(&pdev->dev, vdev);
	ret = vfio_pci_core_register_device(vdev);
	if (ret)
		vfio_put_device(&vdev->vdev);
	return ret;
}

static void vendors_remove(struct pci_dev *pdev)
{
	struct vfio_pci_core_device *vdev = dev_get_drvdata(&pdev->dev);

	vfio_pci_core_unregister_device(vdev);
	vfio_put_device(&vdev->vdev);
}

static const struct pci_device_id vendors_table[] = {
	{ PCI_DRIVER_OVERRIDE_DEVICE_VFIO(PCI_ANY_ID, PCI_ANY_ID) },
	{}
};
MODULE_DEVICE_TABLE(pci, vendors_table);

static struct pci_driver vendors_driver = {
	.name			= "vendors-vfio",
	.id_table		= vendors_table,
	.probe			= vendors_probe,
	.remove			= vendors_remove,
	.err_handler		= &vfio_pci_core_err_handlers,
	.driver_managed_dma	= true,
};
module_pci_driver(vendors_driver);

MODULE_DESCRIPTION("A variant of vfio-pci, for tests");
MODULE_LICENSE("GPL");
